"""Model families: config readers (torch-free), models, checkpoint loader and tokenizer."""
