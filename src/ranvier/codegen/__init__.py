"""What providers share to make code: the loop IR, memory placement, and one folder per target language."""
