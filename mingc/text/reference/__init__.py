"""The rules of the official code (`--speech-text reference`); the goldens pin them."""
