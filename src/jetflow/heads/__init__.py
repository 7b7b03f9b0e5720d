"""Draft heads: modules, their configuration, their context cache and their checkpoint formats."""
