"""Which experts will be used: small predictors, what they have in common, and the mix of them that is calibrated."""
