"""Keeps keys and passwords out of everything that is shown: logs, records, lists of tasks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from typing import Any

from .storage import absolute_url

__all__ = ["Hidden", "public_name", "secrets_of", "without"]

#: Storage options whose values may be shown.
OPEN_OPTIONS = ("endpoint_url", "region_name")
#: User and password before the host of a URL.
_USER = re.compile(r"(?<=://)[^/@\s]*@")


class Hidden:
    """A text that is sent but never shown: not in logs, nor where tasks are listed."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return "<hidden>"


def secrets_of(options: Any) -> list[str]:
    """Return every text in storage options that must not be shown.

    Examples
    --------
    >>> secrets_of({"key": "me", "secret": "abcd", "more": {"endpoint_url": "http://a", "x": "wxyz"}})
    ['abcd', 'wxyz']
    """
    if isinstance(options, dict):
        parts: Iterable[Any] = (value for key, value in options.items() if key not in OPEN_OPTIONS)
    elif isinstance(options, list | tuple):
        parts = options
    else:
        return [str(options)] if isinstance(options, str | int) and len(str(options)) > 3 else []
    return [secret for part in parts for secret in secrets_of(part) if not isinstance(part, bool)]


def without(secrets: Iterable[str], text: str) -> str:
    """Return the text with every secret in it blotted out, and users and passwords of URLs.

    Examples
    --------
    >>> without(["abcd"], "abcd opens s3://me:pass@host/bucket")
    '*** opens s3://***@host/bucket'
    """
    for secret in secrets:
        for form in {secret, json.dumps(secret)[1:-1]}:
            text = text.replace(form, "***")
    return _USER.sub("***@", text)


def public_name(url: str | os.PathLike[str]) -> str:
    """Return the last part of a path or URL: nothing of users, passwords, tokens and folders.

    Examples
    --------
    >>> public_name("https://user:word@host/a/b.zarr?token=1/2"), public_name("s3://key:word@bucket")
    ('b.zarr', 'bucket')
    """
    text = absolute_url(url)
    if "://" in text:
        text = text.split("?")[0].split("#")[0].rstrip("/")
    return text.rsplit("/", 1)[-1].rsplit("@", 1)[-1]
