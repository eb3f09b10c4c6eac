"""Language models: config.json files, their layers, weights and decode steps."""
