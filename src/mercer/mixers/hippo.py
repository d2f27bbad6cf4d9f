"""HiPPO-LegS: the state that remembers an input by its coefficients of Legendre polynomials, over all of the past.

Source: Gu et al. 2020, arXiv 2008.07669; as a normal matrix minus one of rank one: Gu et al. 2021, arXiv 2111.00396.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Real, Complex = NDArray[np.float64], NDArray[np.complex128]


def legs(size: int) -> tuple[Real, Real]:
    """A ``[N, N]`` and B ``[N]`` of x' = A x + B u: A_nk = -sqrt(2n + 1) sqrt(2k + 1) below the diagonal, -(n + 1) on
    it, 0 above; B_n = sqrt(2n + 1)."""
    root = np.sqrt(2 * np.arange(size) + 1)
    matrix = np.tril(np.outer(root, root), -1) + np.diag(np.arange(1.0, size + 1))
    return -matrix, root


def normal_and_low_rank(size: int) -> tuple[Complex, Complex, Complex, Complex]:
    """Eigenvalues, low-rank part, B, and eigenvectors of LegS: with V unitary, V* A V = diag(rates) - p p*.

    A + P P^T with P_n = sqrt(n + 1/2) is -1/2 plus a skew-symmetric matrix, so its eigenvalues are -1/2 + i w and V can
    be had from a Hermitian matrix. They come in conjugate pairs, of which those with w > 0 are returned: rates, p =
    V* P and V* B ``[N/2]``, in the order of w, and V ``[N, N/2]``. size: N, an even number.
    """
    matrix, write = legs(size)
    low = np.sqrt(np.arange(size) + 0.5)
    normal = matrix + np.outer(low, low)
    turns, whole = np.linalg.eigh(-1j * (normal - np.diag(np.diag(normal))))
    vectors: Complex = whole[:, size // 2 :].astype(np.complex128)
    back: Complex = vectors.conj().T
    return -0.5 + 1j * turns[size // 2 :], back @ low.astype(np.complex128), back @ write.astype(np.complex128), vectors
