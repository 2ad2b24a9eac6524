"""`pagerunner proxy`: an HTTP process in front of several servers with OpenAI's API. It has no engine and no tokenizer."""
