"""What a policy does while a model generates: `apply.py` first. Runs where transformer_lens is absent."""
