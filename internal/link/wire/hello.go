// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"io"

	"github.com/fairlead/fairlead/internal/port"
)

// Magic is what each side sends first, in front of its Hello's frame.
const Magic = "FAIRLEAD"

// NonceSize is the length of Hello.Nonce, MACSize of Proof.MAC, in bytes.
const (
	NonceSize = 32
	MACSize   = 32 // HMAC-SHA256
)

// Role is which end of the link a peer is, independent of which dialled.
type Role string

// The roles. A link joins one of each.
const (
	RoleAgent Role = "agent"
	RoleHost  Role = "host"
)

// Handshake is one message before multiplexing starts; exactly one field is
// set. The dialler sends Hello, the listener answers Hello; where proof is
// configured the dialler sends Proof, then the listener. A Refusal may be
// sent instead of any message and is the last.
type Handshake struct {
	Hello   *Hello   `json:"hello,omitempty"`
	Proof   *Proof   `json:"proof,omitempty"`
	Refusal *Refusal `json:"refusal,omitempty"`
}

// Hello describes a peer. Nothing in it is proved until Proof.
type Hello struct {
	Version  int    `json:"version"` // of the protocol, see Version
	Role     Role   `json:"role"`
	Identity string `json:"identity"` // random, names one life of the process
	Name     string `json:"name,omitempty"`
	Build    string `json:"build,omitempty"`
	Network  string `json:"network,omitempty"` // network namespace of the peer, empty if unknown
	Nonce    []byte `json:"nonce"`             // random, of this connection
	Token    bool   `json:"token"`             // proves a shared token and demands the same
}

// Proof shows that a peer has the shared token.
type Proof struct {
	MAC []byte `json:"mac"`
}

// Refusal is why a peer refuses the session.
type Refusal struct {
	Code   string `json:"code"` // one word
	Reason string `json:"reason,omitempty"`
}

// ReadHandshake reads and checks the next handshake message. raw is its body as
// it was sent, for proofs over it.
func ReadHandshake(r io.Reader) (h Handshake, raw []byte, err error) {
	raw, err = readFrame(r, MaxHelloFrame)
	if err != nil {
		return Handshake{}, nil, err
	}
	h, err = decodeHandshake(raw)
	return h, raw, err
}

func decodeHandshake(body []byte) (Handshake, error) {
	var h Handshake
	message := union(func(name string) any {
		switch name {
		case "hello":
			return &h.Hello
		case "proof":
			return &h.Proof
		case "refusal":
			return &h.Refusal
		}
		return nil
	})
	err := decode(body, &message)
	if err == nil {
		err = asMalformed(h.check())
	}
	if err != nil {
		return Handshake{}, err
	}
	if h.Hello != nil {
		h.Hello.Name, h.Hello.Build = port.OneLine(h.Hello.Name), port.OneLine(h.Hello.Build)
		h.Hello.Identity = port.OneLine(h.Hello.Identity)
	}
	if h.Refusal != nil {
		h.Refusal.Code, h.Refusal.Reason = port.OneLine(h.Refusal.Code), port.OneLine(h.Refusal.Reason)
	}
	return h, nil
}

// EncodeHandshake returns h as a frame and that frame's body, which share memory.
func EncodeHandshake(h Handshake) (frame, raw []byte, err error) {
	frame, err = encode(h, MaxHelloFrame)
	if err != nil {
		return nil, nil, err
	}
	return frame, frame[frameHeader:], nil
}

func (h Handshake) check() error {
	switch {
	case h.Hello != nil:
		return h.Hello.check()
	case h.Proof != nil:
		if len(h.Proof.MAC) != MACSize {
			return malformed("proof of %d bytes, want %d", len(h.Proof.MAC), MACSize)
		}
		return nil
	case h.Refusal != nil:
		if err := port.CheckText("refusal: code", h.Refusal.Code, port.MaxWord); err != nil {
			return err
		}
		return port.CheckText("refusal: reason", h.Refusal.Reason, port.MaxReason)
	}
	return malformed("0 messages, want 1")
}

func (h *Hello) check() error {
	if h.Version < 1 {
		return malformed("protocol version %d", h.Version)
	}
	if h.Role != RoleAgent && h.Role != RoleHost {
		return malformed("unknown role %q", string(h.Role))
	}
	if len(h.Nonce) != NonceSize {
		return malformed("nonce of %d bytes, want %d", len(h.Nonce), NonceSize)
	}
	if h.Identity == "" {
		return malformed("no identity")
	}
	if err := port.CheckText("identity", h.Identity, port.MaxWord); err != nil {
		return err
	}
	if err := port.CheckText("name", h.Name, port.MaxName); err != nil {
		return err
	}
	if err := port.CheckText("network", h.Network, port.MaxWord); err != nil {
		return err
	}
	return port.CheckText("build", h.Build, port.MaxWord)
}
