"""Text and token ids: tokenizer, detokenizer, stop strings, chat templates in processes of their own. Torch-free."""
