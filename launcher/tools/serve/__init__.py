"""What a trained model becomes for other runtimes, and what it costs there."""
