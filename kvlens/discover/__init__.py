"""Arrays only: which layers show importance, which signals predict it, how far labels agree."""
