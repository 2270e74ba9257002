"""The interfaces of other libraries on tfla's operator: a program written for one of them changes only its imports.

Each module is imported by itself, and needs PyTorch alone unless it says otherwise.
"""
