// The calculator's agent in JavaScript, with npm's `openai`: node agent.mjs QUESTION
import OpenAI from "openai";

const client = new OpenAI(); // finds OPENAI_BASE_URL and OPENAI_API_KEY
const tools = [
  {
    type: "function",
    function: {
      name: "multiply",
      description: "The product of two whole numbers.",
      parameters: {
        type: "object",
        properties: { a: { type: "integer" }, b: { type: "integer" } },
        required: ["a", "b"],
      },
    },
  },
];

const messages = [{ role: "user", content: process.argv[2] }];
for (let turn = 0; turn < 6; turn++) {
  const { choices } = await client.chat.completions.create({ model: "policy", messages, tools });
  const message = choices[0].message;
  messages.push(message);
  if (!message.tool_calls?.length) {
    console.log((message.content ?? "").replaceAll(/\s+/g, " ")); // the last line is the answer
    break;
  }
  for (const call of message.tool_calls) {
    const { a, b } = JSON.parse(call.function.arguments);
    messages.push({ role: "tool", tool_call_id: call.id, content: String(a * b) });
  }
}
