"""Set-up of the tests on a card: each of several processes takes little memory and few threads.

    python -m pytest -n 14 --dist worksteal tests/gpu

They wait for one CPU core each (lowering kernels is Python), hardly for the card: as many processes as there are cores,
and what has finished its share takes from the others. Set here, before JAX's first use and before the workers start, so
that they inherit it.
"""

import os
import shutil

if shutil.which("nvidia-smi") is not None:  # elsewhere these tests are skipped, and other tests run in this process
    # By default each process takes three quarters of the card at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # How fast the plain forms are does not matter here; timing candidates for each of their products takes seconds.
    if "xla_gpu_autotune_level" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    # The references in NumPy are small: sixteen threads for each only get in the others' way.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
