"""What a client sees. The files here serve every kind of session; `http/` holds requests and responses."""
