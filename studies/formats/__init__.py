"""A study of quality: what each format of the wire costs a model, by direction. It follows FlashCommunication V2."""
