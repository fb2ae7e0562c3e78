"""No part of SGLang: stands where a package of compiled code would, which a server of text on a CPU imports but never calls.

Every name below the package can be imported, inherited from and asked for its parts; whoever calls one is told so.
"""
import importlib.abc
import importlib.machinery
import sys

__version__ = "0"


class Absent(type):
    """A class, function or constant that is not there."""

    def __getattr__(cls, name):
        return absent(f"{cls.__name__}.{name}")

    def __call__(cls, *arguments, **more):
        raise NotImplementedError(f"{cls.__name__}: a stand-in was called")


def absent(name):
    """Something of that name; AttributeError for what only the interpreter asks for."""
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)
    return Absent(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below the package, and puts nothing but stand-ins into it."""

    def find_spec(self, name, path=None, target=None):
        """A module of ours."""
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(__name__ + ".") else None

    def exec_module(self, module):
        """Fill it, as far as anything is asked for."""
        module.__getattr__ = lambda name: absent(f"{module.__name__}.{name}")


def __getattr__(name):
    return absent(f"{__name__}.{name}")


sys.meta_path.append(Finder())
