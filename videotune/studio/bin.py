def items(home):
    return []


def throw(home, kind, title, paths):
    return ""


def restore(home, id): ...
def destroy(home, id): ...
