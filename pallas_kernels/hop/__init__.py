"""A hop: decode the received message, add the local rows in float32, encode again."""
