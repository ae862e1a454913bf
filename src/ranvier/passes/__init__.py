def default_passes(): return []
