"""The judgement of a tuner's candidate, from the Subject that declares its arithmetic."""
