"""The examples in the prepared TFDS directory of these tests."""

WMT = {
    "train": [(f"The light number {i}.", f"Das Licht Nummer {i}.") for i in range(7)],
    "validation": [("That is good.", "Das ist gut."), ("He saw the light.", "Er sah das Licht.")],
    "test": [(f"In the beginning, {i}.", f"Am Anfang, {i}.") for i in range(5)],
}
ARTICLE = "(CNN) God saw the light . The people heard . " + "They went out of the city . " * 40
CNN = {
    "train": [(ARTICLE, "God saw the light .\nThe people heard .")],
    "validation": [(ARTICLE, "The people heard .")],
    "test": [(ARTICLE, "God saw the light .\nThe people heard ."), ("A short one .", "Short .")],
}
LM1B = {"train": ["God saw the light .", "They went out ."], "test": ["The people heard ."]}
