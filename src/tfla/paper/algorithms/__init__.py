"""The counted FLOPs and bytes of every algorithm that computes the operator.

algorithms.get("chunkwise", "sig").flops(T=8192, L=128, dqk=128, dhv=256)
"""

from tfla.paper.algorithms.algorithm import ALGORITHMS, Algorithm, get

__all__ = ["ALGORITHMS", "Algorithm", "get"]
