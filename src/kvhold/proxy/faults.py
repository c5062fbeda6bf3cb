class EngineFault(Exception):
    """reason:  a label in metrics: refused, disconnected, timeout, silent, status, invalid
    is_sent: whether the engine may have got the request
    """

    def __init__(self, reason: str, detail: str, *, is_sent: bool = True) -> None:
        super().__init__(detail)
        self.reason = reason
        self.is_sent = is_sent
