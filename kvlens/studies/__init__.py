"""Verbs that measure on a model (`probe`) and compute with what they measured (`discover`)."""
