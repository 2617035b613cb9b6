"""What a trained model says and how good it is: sampling, scoring, exact loss, benchmarks."""
