"""Running Mixture-of-Experts models whose experts do not fit on the device, without changing a result."""
