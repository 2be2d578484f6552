"""The environment of processes that have one core each."""

# Threads of libraries would fight for it: measured on two busy cores, NumPy was ten times slower with them.
SINGLE_THREADED = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
