class Recommend:
    pass


class Approve:
    pass


class Reject:
    pass


class Apply:
    pass


class History:
    pass
