"""Documents, the tokenizer and packed rows: everything between text on disk and token ids."""
