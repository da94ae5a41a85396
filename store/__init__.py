"""The expert-map database: durable log, catalog, resident search index and bundles."""
