// Asks for prices until the model answers without a call: node shopper.mjs chat|responses whole|streamed QUESTION
import OpenAI from "openai";

const [protocol, how, question] = process.argv.slice(2);
const streamed = how === "streamed";
const client = new OpenAI({ maxRetries: 0 });
const prices = { apple: 3, pear: 5 };
const schema = {
  name: "look_up",
  description: "price of a fruit",
  parameters: { type: "object", properties: { fruit: { type: "string" } }, required: ["fruit"] },
};
const price = (given) => String(prices[JSON.parse(given).fruit]);

// A stream's pieces must be what it is as a whole.
function check(told, whole) {
  if (told !== whole) throw new Error(`streamed ${JSON.stringify(told)}, but ${JSON.stringify(whole)}`);
}

async function chat() {
  const messages = [{ role: "user", content: question }];
  const tools = [{ type: "function", function: schema }];
  for (;;) {
    const ask = { model: "any", messages, tools };
    let message;
    if (streamed) {
      const stream = client.chat.completions.stream(ask);
      let told = "";
      stream.on("content", (piece) => (told += piece));
      message = await stream.finalMessage();
      check(told, message.content ?? "");
    } else {
      message = (await client.chat.completions.create(ask)).choices[0].message;
    }
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls)
      messages.push({ role: "tool", tool_call_id: call.id, content: price(call.function.arguments) });
  }
}

async function responses() {
  const input = [{ role: "user", content: question }];
  const tools = [{ type: "function", strict: true, ...schema }];
  for (;;) {
    const ask = { model: "any", input, tools };
    let answer;
    if (streamed) {
      const stream = client.responses.stream(ask);
      let told = "";
      stream.on("response.output_text.delta", (event) => (told += event.delta));
      answer = await stream.finalResponse();
      check(told, answer.output_text);
    } else {
      answer = await client.responses.create(ask);
    }
    input.push(...answer.output);
    const calls = answer.output.filter((one) => one.type === "function_call");
    if (!calls.length) return answer.output_text;
    for (const call of calls)
      input.push({ type: "function_call_output", call_id: call.call_id, output: price(call.arguments) });
  }
}

console.log(await { chat, responses }[protocol]());
