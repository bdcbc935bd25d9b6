"""Measurements that need a model: interventions on the cache and the labels they give."""
