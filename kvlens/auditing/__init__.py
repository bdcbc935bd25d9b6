"""What a method claims and what it holds: `audit.py` first."""
