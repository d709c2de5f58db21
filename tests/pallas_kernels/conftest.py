"""Settings that the simulation needs before JAX starts its CPU client."""

import os

# The simulation runs each warpgroup of a CTA on a thread of XLA's CPU pool. Four that wait for
# one another need a pool of more threads than a small machine has cores.
os.environ.setdefault("NPROC", "16")
