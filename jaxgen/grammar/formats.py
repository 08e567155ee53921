"""Regular expressions for the formats of JSON schemas: exact for dates and times, and subsets for other formats."""

_COMMON_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # all except 0000, which many programs reject
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTHS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "02-(?:0[1-9]|1[0-9]|2[0-8])",
)
_DATE = f"(?:{_COMMON_YEAR}-(?:{'|'.join(_MONTHS)})|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_HOUR})"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_SIGN = "(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"  # unreserved, sub-delims and pct-encoded in RFC 3986
_SEGMENT_SIGN = f"(?:{_SIGN}|[:@])"
_QUERY = f"(?:{_SEGMENT_SIGN}|[/?])*"
_PATHS = (
    f"//(?:(?:{_SIGN}|:)*@)?{_SIGN}*(?::[0-9]*)?(?:/{_SEGMENT_SIGN}*)*",
    f"/?(?:{_SEGMENT_SIGN}+(?:/{_SEGMENT_SIGN}*)*)?",
)

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": rf"[A-Za-z0-9_%+-]+(?:\.[A-Za-z0-9_%+-]+)*@{_LABEL}(?:\.{_LABEL})+",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{'|'.join(_PATHS)})(?:\?{_QUERY})?(?:#{_QUERY})?",
}
