"""Other libraries' names for what shardfuse has."""
