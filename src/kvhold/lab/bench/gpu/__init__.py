"""`kvhold bench gpu`: what a GPU does with kvhold's copies, part by part, each beside a limit that
is measured in the same run.

Every part runs on three targets: `cuda`; `cpu`, with the host's copier; and `fake`, with the copier
of devices over streams that run late. So a GPU never meets a part that was not run before. Only the
numbers of `cuda` say anything about a GPU.
"""
