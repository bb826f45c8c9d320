#!/usr/bin/python3
"""Finds the weights of a linear function from noisy values, with NumPy alone, on several workers.

    PYTHONPATH=worker/python scripts/gradwire-launch --config configs/plain.yaml --free-port -- \\
        /usr/bin/python3 worker/python/examples/linear_regression.py
"""

import argparse

import numpy

import gradwire

FEATURES = 100


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=1000, help="measurements of each worker")
    options = parser.parse_args()

    gradwire.init()  # Rank and configuration come from the launcher.
    rank = gradwire.rank()

    # What is to be found is the same for all workers; each has measurements of its own.
    true_weights = numpy.random.default_rng(1).standard_normal(FEATURES)
    own = numpy.random.default_rng(100 + rank)
    x = own.standard_normal((options.rows, FEATURES))
    y = x @ true_weights + 0.1 * own.standard_normal(options.rows)

    weights = own.standard_normal(FEATURES)
    gradwire.broadcast(weights, root=0, name="weights")  # All begin with what rank 0 has.
    for step in range(1, options.steps + 1):
        gradient = x.T @ (x @ weights - y) / options.rows
        # The name tells Gradwire which tensor it is; the array may be another one each time.
        gradient = gradwire.push_pull(gradient, name="gradient")
        gradwire.end_step()
        weights -= 0.3 * gradient
        if rank == 0 and (step % 10 == 0 or step == options.steps):
            error = numpy.abs(weights - true_weights).max()
            print(f"step {step}: largest error of a weight {error:.4f}", flush=True)

    gradwire.shutdown()


if __name__ == "__main__":
    main()
