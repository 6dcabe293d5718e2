// Why more of a prompt was computed than was new, as a short mark and as a sentence.

const REASONS = {
  first_turn: ["first turn", "This is the first turn of its conversation, so there was nothing to reuse."],
  diverged: ["text changed", "The client changed text that had been sent before, so all behind that place was computed again."],
  evicted: ["made room", "What this conversation had stored was removed to make room for others."],
  no_checkpoint: ["no restore point", "The text is the same, but this model keeps no state at the place where it could go on."],
  retokenised: ["split anew", "The same text was split into other tokens than before."],
  policy: ["by a setting", "A setting of this server, or a limit of this request, asked for the text as it was sent."],
  store_error: ["store failed", "Stored KV could not be read, so it was computed again. The log says why."],
  not_restorable: ["cannot go on", "This model cannot go on from stored KV."],
  unproved: ["not sure", "The words are those of an earlier conversation, but nothing proves that it is the same one."],
  flattened: ["one message", "The client wrote the conversation into one message, so nothing of it stands where it stood before."],
};

const known = (reason) => REASONS[reason] || [reason.replace(/_/g, " "), `The server says: ${reason.replace(/_/g, " ")}.`];

export const mark = (reason) => known(reason)[0];
export const sentence = (reason) => known(reason)[1];
