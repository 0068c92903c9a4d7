"""The gated delta rule token by token, in float64 NumPy."""

import numpy as np


def recurrence(v, k, q, log_decay, beta, starts=None, state=None):
    """Outputs [B, T, N, H] and the last state [B, N, H, P]."""
    B, T, N, H = v.shape
    G, P = k.shape[2:]
    key = np.arange(N) // (N // G)
    state = np.zeros((B, N, H, P)) if state is None else np.array(state, np.float64)
    y = np.zeros((B, T, N, H))
    for row, t in np.ndindex(B, T):
        if starts is not None and starts[row, t]:
            state[row] = 0
        for n in range(N):
            kept = np.exp(log_decay[row, t, n]) * state[row, n]
            own = k[row, t, key[n]]
            error = v[row, t, n] - kept @ own
            state[row, n] = kept + beta[row, t, n] * np.outer(error, own)
            y[row, t, n] = state[row, n] @ q[row, t, key[n]]
    return y, state


def unit(x):
    """Vectors of length 1."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
