"""How a budget is shared over layers and KV heads, one method a file."""
