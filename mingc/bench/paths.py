"""What is measured: the ways from a request to its answer."""

from __future__ import annotations

PATHS: dict[str, str] = {
    "text": "text → streamed text",
    "image": "image and text → streamed text",
    "clip": "spoken clip and text → streamed text",
    "speech": "text → speech, whole",
    "speech-stream": "text → streamed speech",
    "spoken": "text → streamed text and speech in one chat",
    "realtime": "a spoken turn of a session → speech",
    "picture": "text → a picture, streamed with an unfinished one",
    "transcription": "spoken clip → its text",
}
