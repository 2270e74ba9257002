"""FLOPs and bytes of every way to compute the operator, counted from parts.

forms.get("chunkwise", "sig").flops(T=8192, L=128, dqk=128, dhv=256)
"""

from tfla.paper.forms.form import FORMS, Form, get

__all__ = ["FORMS", "Form", "get"]
