"""Drafters: what proposes trees. Import the one you need from its module, or from `jetflow`."""
