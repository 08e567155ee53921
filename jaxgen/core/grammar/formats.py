"""Regular expressions for the formats of JSON schemas: exact for dates and times, and subsets for other formats.

Formats that are not in JSON Schema's standard are annotations, and are ignored.
"""

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

_BYTE = "(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
_WORD = "[0-9a-f]{1,4}"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_POINTER = "(?:/(?:[A-Za-z0-9_.$ -]|~[01])*)*"
_EMAIL = rf"[A-Za-z0-9_%+-]+(?:\.[A-Za-z0-9_%+-]+)*@{_LABEL}(?:\.{_LABEL})+"
_DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_HOURS = "T(?:[0-9]+S|[0-9]+M(?:[0-9]+S)?|[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?)"
_PARTS = rf"(?:{'|'.join(_PATHS)})(?:\?{_QUERY})?(?:#{_QUERY})?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:{_PARTS}"
_RELATIVE = rf"(?:/|\.\.?/)?[A-Za-z0-9_~.-]*(?:/{_SEGMENT_SIGN}*)*(?:\?{_QUERY})?(?:#{_QUERY})?"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": f"{_WORD}(?::{_WORD}){{7}}|(?:{_WORD}(?::{_WORD}){{0,2}})?::(?:{_WORD}(?::{_WORD}){{0,2}})?",
    "uri": _URI,
    "iri": _URI,
    "uri-reference": f"{_URI}|{_RELATIVE}",
    "iri-reference": f"{_URI}|{_RELATIVE}",
    "uri-template": _URI,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]+W)",
    "regex": "[A-Za-z0-9_ ]*",
}
