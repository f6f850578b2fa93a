"""The end of a reduce-scatter: messages decoded and added to the local rows, not encoded again."""
