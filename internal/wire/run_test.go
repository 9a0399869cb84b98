// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
)

func TestRunRequest(t *testing.T) {
	q := RunRequest{Name: "open", Args: List[string]{"a\nb", "<&>"}, Env: List[string]{"A=b"}, From: `container "web"`}
	var b bytes.Buffer
	if err := WriteRunRequest(&b, q); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadRunRequest(&b); err != nil || !reflect.DeepEqual(got, q) {
		t.Errorf("%+v, %v", got, err)
	}
	q.From = strings.Repeat("\x1b", 2*MaxReason)
	if err := WriteRunRequest(&b, q); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadRunRequest(&b); err != nil || got.From != strings.Repeat(" ", MaxReason) {
		t.Errorf("%+v, %v", got, err)
	}
	if err := WriteRunRequest(&b, RunRequest{Args: List[string]{strings.Repeat("a", MaxRunRequest)}}); !errors.Is(err, ErrTooLarge) || b.Len() > 0 {
		t.Errorf("a long request: %v, %d bytes", err, b.Len())
	}
	for _, text := range []string{``, `{`, `[]`, `{"name":1}`, `{"name":"` + strings.Repeat("a", MaxName+1) + `"}`} {
		if _, err := decodeRunRequest(text); !errors.Is(err, ErrMalformed) {
			t.Errorf("%.40s: %v", text, err)
		}
	}
}

func decodeRunRequest(text string) (RunRequest, error) {
	frame := append([]byte{0, 0, byte(len(text) >> 8), byte(len(text))}, text...)
	return ReadRunRequest(bytes.NewReader(frame))
}

func TestRunFrames(t *testing.T) {
	var b bytes.Buffer
	long := bytes.Repeat([]byte("x"), MaxRunFrame)
	for _, content := range [][]byte{nil, []byte("ab"), long} {
		if err := WriteRunFrame(&b, 'o', content); err != nil {
			t.Fatal(err)
		}
		if kind, got, err := ReadRunFrame(&b); kind != 'o' || !bytes.Equal(got, content) || err != nil {
			t.Errorf("%q, %d bytes of %d, %v", kind, len(got), len(content), err)
		}
	}
	if err := WriteRunFrame(&b, 'o', append(long, 'x')); !errors.Is(err, ErrTooLarge) || b.Len() > 0 {
		t.Errorf("a long frame: %v, %d bytes", err, b.Len())
	}
	for in, want := range map[string]error{
		"":                   io.EOF,
		"\x00\x00":           io.ErrUnexpectedEOF,
		"\x00\x00\x00\x00":   ErrMalformed,
		"\x00\x00\x00\x02o":  io.ErrUnexpectedEOF,
		"\x00\x00\x80\x02oo": ErrTooLarge,
		"\xff\xff\xff\xffoo": ErrTooLarge,
	} {
		if _, _, err := ReadRunFrame(strings.NewReader(in)); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", in, err, want)
		}
	}
}

func FuzzRun(f *testing.F) {
	var b bytes.Buffer
	_ = WriteRunRequest(&b, RunRequest{Name: "a", Args: List[string]{"b"}, Env: List[string]{"C=d"}, From: "e"})
	_ = WriteRunFrame(&b, 'i', []byte("input"))
	f.Add(b.Bytes())
	f.Add([]byte("\x00\x00\x00\x02{}\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bytes.NewReader(in)
		q, err := ReadRunRequest(r)
		if err == nil && (len(q.Name) > MaxName || len(q.From) > MaxReason || strings.ContainsAny(q.From, "\n\x1b")) {
			t.Errorf("%+v", q)
		}
		for err == nil {
			var content []byte
			if _, content, err = ReadRunFrame(r); len(content) > MaxRunFrame {
				t.Errorf("%d bytes", len(content))
			}
		}
	})
}
