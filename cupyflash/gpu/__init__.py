"""The corridor on a GPU: plan, generate one CUDA string, compile it, launch it."""
