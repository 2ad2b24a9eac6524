"""What every chat API has in common: the prompt, what the answer must be, and how it is read."""
