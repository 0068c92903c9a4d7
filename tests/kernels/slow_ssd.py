"""Mamba-2's recurrence and convolution token by token, in float64 NumPy."""

import numpy as np


def recurrence(x, dt, decay, b, c, skip=None, starts=None, state=None):
    """Outputs [B, T, N, H] and the last state [B, N, H, P]."""
    B, T, N, H = x.shape
    G, P = b.shape[2:]
    group = np.arange(N) // (N // G)
    state = np.zeros((B, N, H, P)) if state is None else np.array(state, np.float64)
    y = np.zeros((B, T, N, H))
    for row, t in np.ndindex(B, T):
        if starts is not None and starts[row, t]:
            state[row] = 0
        for n in range(N):
            kept = np.exp(dt[row, t, n] * decay[n]) * state[row, n]
            state[row, n] = kept + dt[row, t, n] * np.outer(x[row, t, n], b[row, t, group[n]])
            y[row, t, n] = state[row, n] @ c[row, t, group[n]]
            if skip is not None:
                y[row, t, n] += skip[n] * x[row, t, n]
    return y, state


def convolution(x, taps, before=None, starts=None):
    """Outputs [B, T, channels]; the token's own tap is the last."""
    B, T, _ = x.shape
    W = taps.shape[-1]
    seen = np.concatenate([np.zeros((B, W - 1, x.shape[2])) if before is None else before, x], axis=1)
    y = np.zeros(x.shape)
    for row, t in np.ndindex(B, T):
        for distance in range(W):
            y[row, t] += taps[:, W - 1 - distance] * seen[row, t + W - 1 - distance]
            if starts is not None and distance <= t and starts[row, t - distance]:
                break
    return y
