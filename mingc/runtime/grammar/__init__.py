"""What an answer may contain: constraints become matchers of llguidance, which allow tokens one after another."""
