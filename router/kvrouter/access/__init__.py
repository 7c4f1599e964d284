"""Who may call: keys of callers, what they may use and how much; keys that engines are shown."""
